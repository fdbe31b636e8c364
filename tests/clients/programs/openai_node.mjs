// OpenAI's client for Node.
import { readFileSync } from "node:fs";
import OpenAI from "openai";

const [url, key, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: key });
const input = JSON.parse(readFileSync(0, "utf-8"));
const answer = await client.embeddings.create({ model, input });
process.stdout.write(JSON.stringify(answer.data.map((each) => each.embedding)));
